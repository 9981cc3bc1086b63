"""What text is in a document?"""
