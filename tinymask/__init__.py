"""tinymask: structural priors as learnable attention masks (arXiv 2608.00418), small enough to read."""
from tinymask.attention import MaskedAttention, masked_attention, masks
from tinymask.transformer import GPT, Block, Encoder, Transformer, ViT, generate, init_weights, parameter_groups

__version__ = "0.1.0"
__all__ = ["Block", "Encoder", "GPT", "MaskedAttention", "Transformer", "ViT", "generate", "init_weights",
           "masked_attention", "masks", "parameter_groups"]
