"""Which skills do clients keep here, and how do they come in and go out? The Skills API."""
