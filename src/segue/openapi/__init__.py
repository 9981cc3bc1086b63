"""What does the API look like to a machine?"""
