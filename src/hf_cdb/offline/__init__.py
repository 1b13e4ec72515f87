"""Files of prompts to files of texts, by as many processes as there are: `hf-cdb generate`."""
