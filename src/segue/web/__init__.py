"""How does the model search the web and read pages?"""
