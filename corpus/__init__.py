"""From the files that people have to the shards that data.py reads; `python data.py` is program.py.

    program     the flags of data.py, what it makes and prints
    prepare     two passes over the documents: text to shards

    inputs      which files are read, and which of them validate by their names
    documents   the documents of a file
    file_formats        bytes that may be compressed, rows of tables
    chat_records        conversations in records: messages, prompt and completion, ShareGPT, Alpaca

    dedup_and_split     pass 1: which documents are kept, and which of them validate
    near_duplicates     MinHash of the documents
    encode      pass 2: tokens

    tokenizers  text to tokens and back        huggingface_tokenizers      those of transformers
    token_streams       tokens to text, as they are drawn
    templates   conversations as tokens, and what is learnt of them

    shards      the files of a data set        mixtures    several sources in one run
    conversations       their windows
    downloads   files from the network         notes_and_progress          what a user sees
"""
EOT = "<|endoftext|>"           # stands between documents
