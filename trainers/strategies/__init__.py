"""How ``gpuctl.Trainer`` exchanges gradients.

- ``chosen``: what ``gpuctl train --strategy`` named
"""
