"""The text that quality is measured on unless another is given: the opening of a novel that is in the public domain.

Jane Austen, Pride and Prejudice (1813), chapter I. Plain ASCII; about 600 tokens under most vocabularies. Small models
have seen it often, so their perplexity is low on it: compare schemes on it, not models.
"""

PASSAGE = """\
It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of \
a wife.

However little known the feelings or views of such a man may be on his first entering a neighbourhood, this \
truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful \
property of some one or other of their daughters.

"My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is let at last?"

Mr. Bennet replied that he had not.

"But it is," returned she; "for Mrs. Long has just been here, and she told me all about it."

Mr. Bennet made no answer.

"Do not you want to know who has taken it?" cried his wife impatiently.

"You want to tell me, and I have no objection to hearing it."

This was invitation enough.

"Why, my dear, you must know, Mrs. Long says that Netherfield is taken by a young man of large fortune from \
the north of England; that he came down on Monday in a chaise and four to see the place, and was so much \
delighted with it that he agreed with Mr. Morris immediately; that he is to take possession before Michaelmas, \
and some of his servants are to be in the house by the end of next week."

"What is his name?"

"Bingley."

"Is he married or single?"

"Oh! single, my dear, to be sure! A single man of large fortune; four or five thousand a year. What a fine \
thing for our girls!"

"How so? how can it affect them?"

"My dear Mr. Bennet," replied his wife, "how can you be so tiresome! You must know that I am thinking of his \
marrying one of them."

"Is that his design in settling here?"

"Design! nonsense, how can you talk so! But it is very likely that he may fall in love with one of them, and \
therefore you must visit him as soon as he comes."

"I see no occasion for that. You and the girls may go, or you may send them by themselves, which perhaps will \
be still better, for as you are as handsome as any of them, Mr. Bingley might like you the best of the party."

"My dear, you flatter me. I certainly have had my share of beauty, but I do not pretend to be any thing \
extraordinary now. When a woman has five grown up daughters, she ought to give over thinking of her own \
beauty."

"In such cases, a woman has not often much beauty to think of."

"But, my dear, you must indeed go and see Mr. Bingley when he comes into the neighbourhood."

"It is more than I engage for, I assure you."
"""
