//! Serializable descriptions of optimizers.

use serde::{Deserialize, Serialize};

use crate::{Result, UpdateRule, check_setting as check};

/// A description of an optimizer: its rule and its learning rate.
///
/// # Examples
/// ```
/// use distribute_rules::{OptimizerDescription, UpdateRule};
///
/// let rule = UpdateRule::Adagrad { initial_accumulator: 0.1, epsilon: 0.0 };
/// let error = OptimizerDescription { learning_rate: 0.1, rule }.check().unwrap_err();
/// assert_eq!(error.to_string(), "epsilon of Adagrad is 0; expected above 0, such as 1e-7");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerDescription {
    /// The learning rate, 0 or more.
    pub learning_rate: f64,
    /// The rule of a step.
    pub rule: UpdateRule,
}

impl OptimizerDescription {
    /// Checks that the settings are in range.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) for the first setting out of range.
    pub fn check(&self) -> Result<()> {
        let learning_rate = self.learning_rate;
        match self.rule {
            UpdateRule::Sgd { momentum, .. } => {
                check("the learning rate of Sgd", learning_rate, learning_rate >= 0.0, "0 or more")?;
                forgetting("the momentum of Sgd", momentum)
            }
            UpdateRule::Adam { beta1, beta2, epsilon, weight_decay } => {
                check("the learning rate of Adam", learning_rate, learning_rate >= 0.0, "0 or more")?;
                forgetting("beta1 of Adam", beta1)?;
                forgetting("beta2 of Adam", beta2)?;
                check("epsilon of Adam", epsilon, epsilon > 0.0, "above 0, such as 1e-8")?;
                check("the weight decay of AdamW", weight_decay, weight_decay >= 0.0, "0 or more")
            }
            UpdateRule::Adagrad { initial_accumulator: initial, epsilon } => {
                check("the learning rate of Adagrad", learning_rate, learning_rate >= 0.0, "0 or more")?;
                check("the initial accumulator of Adagrad", initial, initial >= 0.0, "0 or more, such as 0.1")?;
                check("epsilon of Adagrad", epsilon, epsilon > 0.0, "above 0, such as 1e-7")
            }
            UpdateRule::RmsProp { rho, momentum, epsilon, .. } => {
                check("the learning rate of RmsProp", learning_rate, learning_rate >= 0.0, "0 or more")?;
                forgetting("rho of RmsProp", rho)?;
                forgetting("the momentum of RmsProp", momentum)?;
                check("epsilon of RmsProp", epsilon, epsilon > 0.0, "above 0, such as 1e-7")
            }
            UpdateRule::Lamb { beta1, beta2, epsilon, weight_decay } => {
                check("the learning rate of Lamb", learning_rate, learning_rate >= 0.0, "0 or more")?;
                forgetting("beta1 of Lamb", beta1)?;
                forgetting("beta2 of Lamb", beta2)?;
                check("epsilon of Lamb", epsilon, epsilon > 0.0, "above 0, such as 1e-6")?;
                check("the weight decay of Lamb", weight_decay, weight_decay >= 0.0, "0 or more")
            }
            UpdateRule::Adadelta { rho, epsilon } => {
                check("the learning rate of Adadelta", learning_rate, learning_rate >= 0.0, "0 or more")?;
                forgetting("rho of Adadelta", rho)?;
                check("epsilon of Adadelta", epsilon, epsilon > 0.0, "above 0, such as 1e-7")
            }
            UpdateRule::Adamax { beta1, beta2, epsilon } => {
                check("the learning rate of Adamax", learning_rate, learning_rate >= 0.0, "0 or more")?;
                forgetting("beta1 of Adamax", beta1)?;
                forgetting("beta2 of Adamax", beta2)?;
                check("epsilon of Adamax", epsilon, epsilon > 0.0, "above 0, such as 1e-7")
            }
            UpdateRule::Nadam { beta1, beta2, epsilon } => {
                check("the learning rate of Nadam", learning_rate, learning_rate >= 0.0, "0 or more")?;
                forgetting("beta1 of Nadam", beta1)?;
                forgetting("beta2 of Nadam", beta2)?;
                check("epsilon of Nadam", epsilon, epsilon > 0.0, "above 0, such as 1e-7")
            }
            UpdateRule::Ftrl { initial_accumulator: initial, l1, l2, l2_shrinkage, beta } => {
                check("the learning rate of Ftrl", learning_rate, learning_rate >= 0.0, "0 or more")?;
                // Without a gradient, 0 would be divided by 0.
                check("the initial accumulator of Ftrl", initial, initial > 0.0, "above 0, such as 0.1")?;
                check("the L1 regularization of Ftrl", l1, l1 >= 0.0, "0 or more")?;
                check("the L2 regularization of Ftrl", l2, l2 >= 0.0, "0 or more")?;
                check("the L2 shrinkage of Ftrl", l2_shrinkage, l2_shrinkage >= 0.0, "0 or more")?;
                check("beta of Ftrl", beta, beta >= 0.0, "0 or more")
            }
        }
    }
}

/// Checks a decay rate.
fn forgetting(what: &'static str, given: f64) -> Result<()> {
    check(what, given, (0.0..1.0).contains(&given), "from 0 to below 1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_settings_are_sentences() {
        let adam = UpdateRule::Adam { beta1: 1.0, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 };
        let says = |learning_rate| OptimizerDescription { learning_rate, rule: adam }.check().unwrap_err().to_string();
        assert_eq!(says(-1.0), "the learning rate of Adam is -1; expected 0 or more");
        assert_eq!(says(f64::NAN), "the learning rate of Adam is NaN; expected 0 or more");
        assert_eq!(says(f64::INFINITY), "the learning rate of Adam is inf; expected 0 or more");
        assert_eq!(says(0.1), "beta1 of Adam is 1; expected from 0 to below 1");
    }
}
