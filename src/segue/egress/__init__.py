"""What may sandboxes reach of the network? Names that operator and request allow, through a proxy."""
