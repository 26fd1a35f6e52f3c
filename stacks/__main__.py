"""``pulumi preview`` in a checkout begins here (``main: stacks`` in ``Pulumi.yaml``). This folder is then on the path
besides the installed package, so its modules could be had by two names: all is imported as ``gpuctl``."""

from gpuctl.stacks.program import main

if __name__ == "__main__":
    main()
