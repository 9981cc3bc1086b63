"""What of a history that is sent again is known here already?"""
