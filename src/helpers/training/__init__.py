"""Training: pre-training of the micro models and GRPO. Uses models, tasks, grading; is used by notebooks only."""
