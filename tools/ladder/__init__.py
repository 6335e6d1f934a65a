"""Predict the loss of a model before it is trained: train smaller ones, the rungs, and fit a law.

    python -m tools.ladder --steps 12800 --batch-size 4 --warmup-steps 100 --jobs 2 --out out/ladder

takes train.py's flags of the target, here of the size `nano`. It trains the same model in four
smaller widths, each on S/8, S/4, S/2 and all of its S steps, fits

    L(N, D) = E + A N^-a + B D^-b           (tools/scaling_law.py)

N: parameters that multiply (none that are looked up; of a mixture those that a token uses), D:
tokens, L: validation loss in nats. It prints what the target will reach, how well the ladder
without its largest rung would have predicted that rung, and the command that trains the target. It
writes ladder.json and, with matplotlib, ladder.svg to --out.

Runs that have ended are not repeated, and one that was stopped continues: give the same command
again, also with more --rungs. Once the target has been trained by the printed command, the same
command says how far off the prediction was.

    steps      S/8      S/4            S/2                            S
    trunk       |        |              |                        _____|     the rate is constant,
    branches   \\       \\             \\                            \\    then falls to a tenth

A branch decays from a checkpoint of the trunk (--lr-schedule wsd; Haegele et al. 2024): four
numbers of tokens cost 1.2 times the largest. All rungs read the same batches, and the target reads
as many tokens, so that from the rungs to the target only N grows. The rungs have the target's
depth, and heads of about its size. The learning rate of a rung is the target's times
sqrt(width of the target / its width).

--budget FLOPS --gpu NAME --price P says which size and tokens are best for a budget, and its cost.

What decides whether it works: small batches and many steps, so that the losses are on a power law
(3 tokens for each parameter at least: points with fewer are left out); text that is not repeated;
and a back test that is as close as the prediction has to be.
"""
