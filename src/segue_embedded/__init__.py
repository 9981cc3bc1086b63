"""The room that answers: how does a model run in this process, and where are its weights?"""
