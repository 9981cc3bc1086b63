"""Where does a job stand among others, and which replica of an engine should take it?"""
