"""From the files that people have to the shards that data.py reads; `python data.py` is program.py.

    flags       the flags of data.py           program     what it makes and prints
    prepare     two passes over the documents: text to shards
    inputs      which files are read           formats     the documents of a file
    file_kinds  what a file is                 records     those of lines and tables
    compressed  .gz and .zst                   messages    those of a conversation
    json_stream         JSON without lines     message_fields      what one message says
    unread_fields       told to the user
    conversations       their tokens, and what is learnt
    chat_templates      which template a model has      jinja_templates     runs it
    dedup_and_split     pass 1: which documents are kept, and which of them validate
    split_by_hash       5% of them validate    split_by_filename       or the files named so
    encode      pass 2: tokens
    near_duplicates     MinHash of the documents        content_type        how a file is read
    tokenizers  text to tokens and back        json_tokenizers     a tokenizer.json
    tiktoken_tokenizers         GPT-2's and others, bytes, one's own
    tokenizer_config    what the files beside a tokenizer.json say of it
    bpe         trains a tokenizer             shards      the files of a data set
    windows     of tokens, of conversations    mixtures    several sources in one run
    downloads   files from the network
    console     notes, progress                file_changes        whether a file has changed
    tables      Parquet and Arrow
    temporary_folder        files that are not complete yet
"""
