"""Where TaskD meets the frameworks."""
