"""The room that answers: which ids are this text, and which bytes is this id?"""
