"""What of a prompt could have been reused, and was not? Found out after the turn."""
