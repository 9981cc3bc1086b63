"""What can a person type?"""
