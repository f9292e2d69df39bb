"""From a name to a model: paths and Hub ids, targets, drafters and tokenizers."""
