"""The demo's 64 chat prompts: from answers of one word to stories, in a shuffled order."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One user message.

    Attributes:
        text: what is asked.
        max_tokens: the answer is cut there; the model often ends earlier by itself.
    """

    text: str
    max_tokens: int


DEMO_PROMPTS: tuple[DemoPrompt, ...] = (
    DemoPrompt("Name a fruit that is red.", 20),
    DemoPrompt("How many days are in a week? Give just the number.", 12),
    DemoPrompt("Give one tip for sleeping better.", 40),
    DemoPrompt("Summarize the water cycle in one paragraph.", 110),
    DemoPrompt("Give a synonym for 'happy'.", 20),
    DemoPrompt("How many minutes are in an hour? Give just the number.", 16),
    DemoPrompt("What sound does a cow make? One word.", 16),
    DemoPrompt("What is the tallest mountain on Earth? Answer briefly.", 24),
    DemoPrompt("Say hello in Spanish.", 20),
    DemoPrompt("Explain to a child of ten how a rainbow appears.", 96),
    DemoPrompt("Write a haiku about a river.", 28),
    DemoPrompt("What color do you get when you mix blue and yellow? Answer with one word.", 20),
    DemoPrompt("Name one planet with rings.", 24),
    DemoPrompt("Write a short poem about the first snow of winter.", 72),
    DemoPrompt("Say thank you in Italian. One word.", 16),
    DemoPrompt("What is the currency of Japan? One word.", 16),
    DemoPrompt("Give me three names for a black cat.", 32),
    DemoPrompt("Plan a weekend in the countryside for a family with two small children.", 150),
    DemoPrompt("What is the capital of France? Answer with one word.", 20),
    DemoPrompt("What is the plural of 'mouse'? One word.", 16),
    DemoPrompt("Tell me a long story about a lighthouse keeper who finds a message in a bottle.", 160),
    DemoPrompt("How many continents are there? Give just the number.", 12),
    DemoPrompt("Describe the smell of rain in one sentence.", 36),
    DemoPrompt("Write a letter from a grandmother to her grandson who has just left for university.", 150),
    DemoPrompt("Finish the proverb: The early bird catches the", 20),
    DemoPrompt("In one sentence, what does a compiler do?", 40),
    DemoPrompt("What comes after Tuesday? One word.", 16),
    DemoPrompt("Is the sun a star? Answer yes or no.", 12),
    DemoPrompt("Give advice to someone who speaks in public for the first time.", 100),
    DemoPrompt("Which ocean is the largest? Answer briefly.", 24),
    DemoPrompt("What color is an emerald? One word.", 16),
    DemoPrompt("Give a short weather report for a stormy day on the coast.", 60),
    DemoPrompt("What do bees make? One word.", 16),
    DemoPrompt("Name one instrument with strings.", 20),
    DemoPrompt("Tell a tale of two brothers who build a boat and sail to an island nobody has mapped.", 160),
    DemoPrompt("Explain in two sentences why the sky is blue.", 64),
    DemoPrompt("Compare cats and dogs as pets.", 120),
    DemoPrompt("Is a tomato a fruit? Answer yes or no.", 12),
    DemoPrompt("Describe, step by step, how to bake a simple loaf of bread.", 160),
    DemoPrompt("What is the square root of 81? Give just the number.", 16),
    DemoPrompt("Does ice float on water? Answer yes or no.", 12),
    DemoPrompt("What season comes before summer? One word.", 16),
    DemoPrompt("Name two programming languages.", 24),
    DemoPrompt("How many legs does a spider have? Give just the number.", 12),
    DemoPrompt("Invent a name for a bakery that opens only at night.", 24),
    DemoPrompt("Name the author of Romeo and Juliet.", 24),
    DemoPrompt("What is the opposite of hot? One word.", 16),
    DemoPrompt("Who wrote Don Quixote?", 24),
    DemoPrompt("What is 7 plus 5? Give just the number.", 16),
    DemoPrompt("Write the opening scene of a mystery set on a night train through the mountains.", 160),
    DemoPrompt("What is the freezing point of water in Celsius? Give just the number.", 20),
    DemoPrompt("Write a product description for a backpack made of recycled sails.", 110),
    DemoPrompt("List five things to pack for a day at the beach.", 64),
    DemoPrompt("What is the main ingredient of an omelette? One word.", 16),
    DemoPrompt("Write a dialogue between a robot who wants to paint and the painter who teaches it.", 150),
    DemoPrompt("Which animal is called the king of the jungle?", 20),
    DemoPrompt("What is the chemical symbol for gold? Answer with the symbol only.", 16),
    DemoPrompt("Who painted the Mona Lisa?", 24),
    DemoPrompt("What language is spoken in Brazil? One word.", 16),
    DemoPrompt("Is water wet? Answer yes or no.", 12),
    DemoPrompt("Translate 'good morning' into French.", 20),
    DemoPrompt("Explain what a library is for, in one sentence.", 36),
    DemoPrompt("Why should we save energy at home? Give three reasons.", 90),
    DemoPrompt("Which planet is closest to the sun?", 24),
)
