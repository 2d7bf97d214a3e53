"""Training: pre-training of the micro models, GRPO, and what is quantized meanwhile. Uses models, quant, tasks, grading."""
