"""Questions to Google Cloud before anything is made: ``checks``."""
