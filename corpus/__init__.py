"""From the files that people have to the shards that data.py reads; `python data.py` is program.py.

    flags       the flags of data.py           program     what it makes and prints
    prepare     two passes over the documents: text to shards

    inputs      which files are read           formats     the documents of a file
    file_kinds  kinds by name, and advice      content_type        how a file is read, by its bytes
    compressed  .gz and .zst                   tables      Parquet and Arrow
    records     objects of JSON, rows          json_stream         JSON that is not by lines
    refused_records     what is told of one that is refused, and the command that mends it
    chat_formats        records of chats: messages, prompt and completion, ShareGPT, Alpaca
    chat_message        one of their messages: role, content, reasoning, weight

    dedup_and_split     pass 1: which documents are kept, and which of them validate
    near_duplicates     MinHash of the documents
    split_by_hash       5% of them validate    split_by_filename       or the files named so
    encode      pass 2: tokens

    tokenizers  text to tokens and back        token_streams       tokens to text as they are drawn
    tiktoken_tokenizers         GPT-2's and others, bytes, one's own
    json_tokenizers     a tokenizer.json       vocab_and_merges    GPT-2's older pair as one
    byte_level_tokenizers       whose tokens are bytes      text_tokenizers     or text
    tokenizer_config    what the files beside a tokenizer.json say of it
    bpe         trains a tokenizer
    conversations       their tokens, and what is learnt
    published_templates         which template a model has      jinja_templates     runs it

    shards      the files of a data set        mixtures    several sources in one run
    windows     of tokens, of conversations    permutation         their order in an epoch
    downloads   files from the network         notes_and_progress          what a user sees
    file_changes        whether a file has changed
    temporary_folder    files that are not complete yet
"""
