"""What does a JSON schema say, and what would satisfy it?"""
