"""What clients keep for us, and how no other client can read it."""
