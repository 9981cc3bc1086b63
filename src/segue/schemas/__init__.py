"""What does a schema say that a client has sent, and how is a model held to it?"""
