"""Every way the product may vary: protocols, and the values that they speak."""
