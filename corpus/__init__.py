"""From the files that people have to documents and tokens. data.py writes the shards."""
