"""Where do the commands of a model run? In sandboxes that a process without secrets keeps."""
