"""What turns a machine into a node, and the agent that then runs on it.

Read ``agent`` first (the loop), then ``run`` (a node's part in one round) and ``interpreter`` (why a round is quick).
"""
