"""Ways of training together. ``Trainer`` knows the seam, and no method by name.

- ``interface``: what a method is to ``Trainer`` and to a loop of one's own.
- ``plan``: the strategy of a run, from the script and from ``--strategy``, and what is refused.
- ``chosen``: what ``--strategy`` named, as a worker finds it; ``named``: the strategy of that name.
- ``gradients``: forward and backward over the micro-batches of a step.
- ``gradient``: methods that exchange gradients in each step.
- ``outer``: methods by which workers train apart for many steps.
- ``speeds``: work for unlike machines.
- ``other_method``: a checkpoint's strategy is another one than the run's.
"""
