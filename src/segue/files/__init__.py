"""Which files do clients keep here, and how do they come in and go out? The Files API, and the place of the bytes."""
