"""The translation tutorial: GRU encoder, an attention decoder with teacher forcing, an optimizer for each of them."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from shapes_common import ending, start
from torch import optim

SOS_token, EOS_token, MAX_LENGTH, hidden_size, teacher_forcing_ratio = 0, 1, 4, 32, 0.7
SOURCE, TARGET = 14, 14
steps, seed = start()  # of both optimizers together
n_iters = max(steps // 2, 1)
pairs_rng = random.Random(seed)
lexicon = list(range(2, TARGET))
pairs_rng.shuffle(lexicon)


def make_pairs(num):
    """A sentence, and its translation word by word in reverse order."""
    sources = [[pairs_rng.randrange(2, SOURCE) for _ in range(MAX_LENGTH - 1)] for _ in range(num)]
    targets = [[lexicon[word - 2] for word in reversed(words)] for words in sources]
    return torch.tensor([[*w, EOS_token] for w in sources]), torch.tensor([[*w, EOS_token] for w in targets])


class EncoderRNN(nn.Module):
    def __init__(self, input_size, hidden_size, dropout_p=0.1):
        super().__init__()
        self.embedding = nn.Embedding(input_size, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, input):
        return self.gru(self.dropout(self.embedding(input)))


class BahdanauAttention(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.Wa, self.Ua = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.Va = nn.Linear(hidden_size, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))).squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class AttnDecoderRNN(nn.Module):
    def __init__(self, hidden_size, output_size, dropout_p=0.1):
        super().__init__()
        self.embedding = nn.Embedding(output_size, hidden_size)
        self.attention = BahdanauAttention(hidden_size)
        self.gru = nn.GRUCell(2 * hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, output_size)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        decoder_input = torch.full((encoder_outputs.size(0), 1), SOS_token)
        decoder_hidden, decoder_outputs = encoder_hidden[0], []
        for i in range(MAX_LENGTH):
            embedded = self.dropout(self.embedding(decoder_input))
            context, _ = self.attention(decoder_hidden.unsqueeze(1), encoder_outputs)
            decoder_hidden = self.gru(torch.cat((embedded, context), dim=2)[:, 0], decoder_hidden)
            decoder_output = self.out(decoder_hidden).unsqueeze(1)
            decoder_outputs.append(decoder_output)
            if target_tensor is not None:
                decoder_input = target_tensor[:, i].unsqueeze(1)  # Teacher forcing
            else:
                decoder_input = decoder_output.argmax(-1).detach()
        return F.log_softmax(torch.cat(decoder_outputs, dim=1), dim=-1)


def train_step(input_tensor, target_tensor, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion):
    encoder_optimizer.zero_grad()
    decoder_optimizer.zero_grad()
    encoder_outputs, encoder_hidden = encoder(input_tensor)
    forced = target_tensor if random.random() < teacher_forcing_ratio else None
    decoder_outputs = decoder(encoder_outputs, encoder_hidden, forced)
    loss = criterion(decoder_outputs.view(-1, decoder_outputs.size(-1)), target_tensor.view(-1))
    loss.backward()
    encoder_optimizer.step()
    decoder_optimizer.step()
    return loss.item()


def evaluate(encoder, decoder, inputs, targets):
    encoder.eval()
    decoder.eval()
    with torch.no_grad():
        found = decoder(*encoder(inputs)).argmax(-1)
    return float((found == targets).float().mean())


encoder, decoder = EncoderRNN(SOURCE, hidden_size), AttnDecoderRNN(hidden_size, TARGET)
encoder_optimizer = optim.Adam(encoder.parameters(), lr=0.002)
decoder_optimizer = optim.Adam(decoder.parameters(), lr=0.002)
criterion = nn.NLLLoss()
print_loss_total = 0
for n in range(1, n_iters + 1):
    source, target = make_pairs(16)
    print_loss_total += train_step(source, target, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion)
    if n % 50 == 0:
        print(f"({n} {100 * n // n_iters}%) {print_loss_total / 50:.4f}")
        print_loss_total = 0
accuracy = evaluate(encoder, decoder, *make_pairs(100))
print(f"word accuracy {accuracy:.4f}")
ending(steps, accuracy > 0.6, encoder, decoder, encoder_optimizer, decoder_optimizer, final=accuracy)
