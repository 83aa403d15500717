"""Tokenizers: text to ids, ids to text while they are generated, chat templates."""

from .detokenizer import IncrementalDetokenizer
from .loading import load_tokenizer
from .tokenizer import Tokenizer, check_tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "check_tokenizer", "load_tokenizer"]
