"""From the files that people have to documents and tokens. data.py writes the shards.

    inputs      which files are read           passes      the two passes over the documents
    kinds       what a file is                 tokenizers  text to tokens and back
    formats     the documents of a file        json_tokenizers     a tokenizer.json
    flags       of data.py, and its summary
    split       which documents validate       near_duplicates     MinHash of the documents
    downloads   files from the network         bpe         trains a tokenizer
    compressed  .gz and .zst                   messages    notes, progress, errors in a line
    records     lines and tables of documents  disk        files that appear when they are whole
    problems    what is skipped or refused
"""
