"""One budget for KV cache and adapters: pages, who owns them, and who must leave."""
