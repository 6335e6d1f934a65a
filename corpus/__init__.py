"""From the files that people have to documents and tokens. data.py writes the shards.

    inputs      which files are read           passes      the two passes over the documents
    kinds       what a file is                 tokenizers  text to tokens and back
    formats     the documents of a file        flags       of data.py, and its summary
    downloads   files from the network         near_duplicates
    compressed, records, problems              bpe         trains a tokenizer
    split       which documents validate       messages, disk
"""
