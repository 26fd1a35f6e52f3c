"""What maintainers run: nothing here is in the package."""
