"""The engine's own scheduler under a fake clock and a cost model: capacity planning, studies. No torch, no device."""
