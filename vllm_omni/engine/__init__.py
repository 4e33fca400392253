"""What runs when: the stage contract, the stages, and the orchestrator that routes requests through them."""
