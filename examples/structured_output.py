"""An answer as a typed value: the schema of a pydantic model, enforced where the engine can."""

from __future__ import annotations

from pydantic import BaseModel
from server import client, model


class Fruit(BaseModel):
    """What is asked for."""

    name: str
    colour: str
    grams: int


response = client.responses.parse(model=model, input="Describe a fruit.", text_format=Fruit)
fruit = response.output_parsed
print(type(fruit).__name__, fruit)
