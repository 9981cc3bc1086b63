"""What of a prompt could have been reused, and was not?"""
