"""Audio codecs: from codebook entries to samples."""
