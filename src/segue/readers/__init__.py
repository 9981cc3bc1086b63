"""The room that answers: what did the model say, and how is it made to say it?"""
