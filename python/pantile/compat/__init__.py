"""Functions of other attention libraries, with their names and argument order, on pantile.

    import pantile.compat

    pantile.compat.install()                   # import flash_attn, import flash_attn_interface
    from flash_attn import flash_attn_func

``pantile.compat.flash_attn`` has those of FlashAttention-2, ``pantile.compat.flash_attn_3`` those
of FlashAttention-3 and ``pantile.compat.vllm`` the one that vLLM calls. Importing them changes
nothing outside of pantile. Every argument is served or refused by name (docs/integrations.md).
"""

from __future__ import annotations

from pantile.compat._install import Installation, install

__all__ = ["Installation", "install"]
