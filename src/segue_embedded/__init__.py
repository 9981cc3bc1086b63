"""How does a model run inside the server, and where are its weights?"""
