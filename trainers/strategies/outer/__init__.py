"""Methods by which workers train apart for many steps, and then make one of what they have learned.

- ``local_steps``: what they share: steps on each worker, and boundaries
- ``local_model``: one worker's copy of the model, and the weights of the last boundary
- ``local_sgd``: the mean of the weights
- ``diloco``: an outer optimizer, to which what the workers have learned is a gradient
- ``every_step``: none of them: gradients are exchanged in each step
"""
