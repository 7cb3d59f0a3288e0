"""What this package's layers and models cost."""
