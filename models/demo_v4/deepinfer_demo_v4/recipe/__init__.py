"""How the model was made: corpus, vocabulary, training, evaluation. Needs torch, numpy, tokenizers and safetensors."""
