"""What is left of vLLM without a GPU? All of it but the model: `hollow_vllm` starts one."""
