"""What runs in vLLM's environment: no module of it imports burnish."""
