"""4a: what of that which a server of an engine says is believed?"""
