"""What may the server do for the model?"""
